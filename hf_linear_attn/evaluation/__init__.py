"""What a converted model is worth: fidelity, perplexity, sentence embeddings, speed, and a report of them."""
