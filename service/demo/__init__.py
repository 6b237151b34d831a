"""`make demo`: a small model, data, and a fine-tune of it over REST."""
