"""How is a user's language model fine-tuned privately on a file of texts?"""
