"""Structured output: answers that match a JSON schema, a regular expression, a choice or a grammar."""
