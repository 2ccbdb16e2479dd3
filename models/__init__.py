"""Builds decoder models for tests, demonstrations and measurements; not part of the installed package."""
