"""`mhsa bundle`: an artifact with TVM's runtime and a C++ program (`program/`, `sources/`) that runs it."""
