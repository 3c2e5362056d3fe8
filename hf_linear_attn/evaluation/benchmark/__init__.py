"""Speed and memory of every mechanism beside exact attention, other packages, and the limits of the machine."""
