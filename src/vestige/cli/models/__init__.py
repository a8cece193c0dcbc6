"""How is one model trained from the terminal, and what is printed about it afterwards?"""
