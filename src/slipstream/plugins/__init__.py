"""Slipstream from inside other frameworks. Each module imports its own, and nothing else imports them."""
