"""Modules sliced over tensor parallel ranks."""
