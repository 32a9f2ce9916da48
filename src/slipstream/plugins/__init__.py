"""Slipstream inside other people's software. Each module needs the library that it is named after, and is imported by whoever
uses that."""
