"""Checks of the project that take too long for every run of the test suite, each one command."""
