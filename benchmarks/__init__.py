"""Measurements with targets. Each module prints JSON lines on stdout and remarks for people on stderr."""
