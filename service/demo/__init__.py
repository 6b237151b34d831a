"""`make demo`: a small model, its data, and a fine-tuning job over REST."""
