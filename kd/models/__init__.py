"""Models: classifiers, weights, the frozen teacher and its cache, graphs in other
runtimes.
"""
