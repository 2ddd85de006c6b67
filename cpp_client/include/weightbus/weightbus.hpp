// All of the client: `#include <weightbus/weightbus.hpp>`.
#pragma once

#include "dtypes.hpp"
#include "floats.hpp"
#include "result.hpp"
#include "snapshot.hpp"
#include "state.hpp"
#include "tensor.hpp"
#include "worker.hpp"
