"""Networks as kd runs them: classifiers, weights, the frozen teacher, its cache, graphs in other runtimes."""
