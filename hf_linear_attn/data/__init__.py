"""Labelled tasks and text to train on: loaded from files or the Hub, encoded, collated. Needs the extra `train`."""
