// nanobind itself, compiled into the extension: no CMake, no shared library.
#include <nb_combined.cpp>
