"""Formulas: a family of losses a file."""
