-- A worker in Lua, which prints each version of the model "line":
-- luajit worker.lua tcp://HOST:PORT [SECONDS]
--
-- It calls libweightbus through LuaJIT's FFI. Set WEIGHTBUS_H and WEIGHTBUS_SO to the paths of the
-- header and the library unless `make -C c_client install` has installed them. Do not set `on_event`
-- to a Lua function: it would be called in a thread that Lua does not know. Use wb_look() instead.

local ffi = require("ffi")

local function declarations(path)
  local file = assert(io.open(path))
  local header = file:read("*a"):gsub("#[^\n]*", "") -- the FFI parses neither preprocessor lines nor C++
  file:close()
  return (header:gsub('extern "C" {', ""):gsub('} // extern "C"', ""))
end

ffi.cdef(declarations(os.getenv("WEIGHTBUS_H") or "/usr/local/include/weightbus.h"))
local wb = ffi.load(os.getenv("WEIGHTBUS_SO") or "libweightbus.so.1")

local function why() return ffi.string(wb.wb_error()) end

local function check(code)
  if code ~= wb.WB_OK then error(why(), 0) end
end

-- The library owns this memory, and only the library writes to it.
local three = ffi.new("uint64_t[1]", 3)
local tensors = ffi.new("wb_tensor[2]", {
  { name = "slope", dtype = "F32", shape = three, rank = 1 },
  { name = "offset", dtype = "F32" },
})
local model = ffi.new("wb_model *[1]")
check(wb.wb_model_resident(tensors, 2, model))
local slope, offset = ffi.cast("float *", tensors[0].data), ffi.cast("float *", tensors[1].data)

local wanted = ffi.new("wb_wanted[1]", { { id = "line", model = model[0] } })
local options = ffi.new("wb_options", { address = assert(arg[1], "worker.lua ADDRESS [SECONDS]"),
  wanted = wanted, wanted_count = 1, client = "lua/" .. jit.version:match("[%d.]+") })
options.size = ffi.sizeof(options)
local worker = ffi.new("wb_worker *[1]")
check(wb.wb_connect(options, worker))

local patience = 1000 * (arg[2] or 30)
local update, reading = ffi.new("wb_update"), ffi.new("wb_reading *[1]")
while true do
  local code = wb.wb_receive(worker[0], patience, update)
  if code == wb.WB_NOTHING then break end
  if code ~= wb.WB_OK then
    io.stderr:write(why(), "\n") -- the old version still runs
  elseif wb.wb_read(model[0], reading, nil, nil) == wb.WB_OK then -- no version is applied until wb_read_end
    print(("version %d: %g %g %g, %g"):format(tonumber(update.version),
      slope[0], slope[1], slope[2], offset[0]))
    io.stdout:flush()
    wb.wb_read_end(reading[0])
  end
end
wb.wb_worker_free(worker[0])
wb.wb_model_free(model[0])
