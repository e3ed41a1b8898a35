"""Result files in, Markdown and pictures out."""
