"""What is one example's loss?"""
