"""How are private rows or texts turned into made-up ones that may be shared?"""
