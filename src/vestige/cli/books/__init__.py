"""How does a person keep the budget of a dataset from the terminal?"""
