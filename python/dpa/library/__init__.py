"""The shared library: finding and loading it, building it at run time, what is installed."""
