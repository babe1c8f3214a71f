"""Averages of the weights of several models of one architecture ("model soups")."""
