"""Knowledge about other libraries."""
