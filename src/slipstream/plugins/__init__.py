"""Integrations with other frameworks, one module per framework. Only their users import them."""
