"""Is this machine, or are these machines, fit to train?"""
