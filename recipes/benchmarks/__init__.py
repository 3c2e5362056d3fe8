"""Speed, memory and quality of every mechanism beside exact attention, other packages and the machine's limits."""
