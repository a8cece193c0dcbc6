"""How is a language model of somebody's own fine-tuned privately on a file of texts?"""
