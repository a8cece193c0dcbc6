"""How is one model trained from the terminal, and what is said about it afterwards?"""
