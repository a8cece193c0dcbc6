"""Many runs against each other: which method is best at one budget, and is the difference real?"""
