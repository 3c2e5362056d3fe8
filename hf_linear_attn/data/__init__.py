"""Labelled tasks and text to train on: loaded from local files or the Hub, encoded, collated. Needs the extra `train`."""
