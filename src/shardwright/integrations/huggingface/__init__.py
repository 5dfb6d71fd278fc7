"""Knowledge about Hugging Face transformers."""
