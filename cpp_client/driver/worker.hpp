// A worker that says as JSON what happens to it.
#pragma once

#include <string>
#include <vector>

// Takes the command line from "worker" on; returns the exit status.
int run_worker(const std::vector<std::string>& arguments);
