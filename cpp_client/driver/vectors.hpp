// The golden vectors (tests/vectors): one line of JSON for each case.
#pragma once

#include <string>

// Returns the exit status.
int run_vectors(const std::string& folder);
