"""Turn a configuration into a `Run`: plans of values, from which parts are opened,
built and compared.
"""
