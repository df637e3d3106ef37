// The functions of CUDA's runtime that kernels.cu calls, implemented on the driver's interface. They are for a library
// whose kernels were compiled by NVRTC, and the rest by a C++ compiler without CUDA. op_builder/nvrtc.py puts the compiled
// kernels into the library.
//
// The address of a kernel is the address of a string, its name in the image. So the linker fails if a kernel that is
// called here does not exist. Contexts are torch's: the primary ones.
#pragma once

#include <dlfcn.h>
#include <stdint.h>

#include <map>
#include <mutex>

#define __device__
#define __host__
#define __forceinline__ inline

extern "C" __attribute__((visibility("hidden"))) const char zl_image[];  // a cubin

typedef int cudaError_t;  // a CUresult, or NO_DRIVER
typedef struct CUstream_st* cudaStream_t;

struct dim3 {
  unsigned x;
  explicit dim3(unsigned x) : x(x) {}
};

namespace zl {

constexpr cudaError_t NO_DRIVER = 100000;

// The driver's functions, of the types in cuda.h. A CUdevice is an int, a CUdeviceptr 64 bits, handles are pointers.
struct Driver {
  int (*init)(unsigned flags) = nullptr;
  int (*device_get)(int* device, int ordinal) = nullptr;
  int (*retain)(void** context, int device) = nullptr;
  int (*set_current)(void* context) = nullptr;
  int (*load)(void** module, const void* image) = nullptr;
  int (*function)(void** function, void* module, const char* name) = nullptr;
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared_bytes, void* stream, void** arguments, void** extra) = nullptr;
  int (*fill)(unsigned long long at, unsigned char value, size_t bytes, void* stream) = nullptr;
  int (*error_string)(int error, const char** text) = nullptr;
  int problem = NO_DRIVER;

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    const bool all = find(library, "cuInit", init) && find(library, "cuDeviceGet", device_get) &&
                     find(library, "cuDevicePrimaryCtxRetain", retain) && find(library, "cuCtxSetCurrent", set_current) &&
                     find(library, "cuModuleLoadData", load) && find(library, "cuModuleGetFunction", function) &&
                     find(library, "cuLaunchKernel", launch) && find(library, "cuMemsetD8Async", fill) &&
                     find(library, "cuGetErrorString", error_string);
    if (all) problem = init(0);
  }

  template <class Function>
  static bool find(void* library, const char* name, Function& function) {
    function = (Function)dlsym(library, name);
    return function != nullptr;
  }

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }
};

// Loaded modules by device, kept until the process ends, like the contexts.
struct Loaded {
  void* context = nullptr;
  void* module = nullptr;
  std::map<const void*, void*> functions;  // by the address of the name
};

struct Devices {
  std::mutex lock;
  std::map<int, Loaded> loaded;

  static Devices& get() {
    static Devices* const devices = new Devices;  // never destroyed: threads may outlive static objects
    return *devices;
  }
};

inline int& current_device() {
  static thread_local int device = -1;
  return device;
}

}  // namespace zl

// Make the primary context of the device current for this thread, and load the kernels into it the first time.
inline cudaError_t cudaSetDevice(int ordinal) {
  const zl::Driver& driver = zl::Driver::get();
  if (driver.problem) return driver.problem;
  zl::Devices& devices = zl::Devices::get();
  const std::lock_guard<std::mutex> held(devices.lock);
  zl::Loaded& of = devices.loaded[ordinal];
  if (!of.context) {
    int device = 0;
    if (const int error = driver.device_get(&device, ordinal)) return error;
    void* context = nullptr;
    if (const int error = driver.retain(&context, device)) return error;
    of.context = context;
  }
  if (const int error = driver.set_current(of.context)) return error;
  if (!of.module) {
    void* module = nullptr;
    if (const int error = driver.load(&module, zl_image)) return error;
    of.module = module;
  }
  zl::current_device() = ordinal;
  return 0;
}

// After cudaSetDevice in the same thread. `arguments` are copied before it returns.
template <class Arguments>
cudaError_t cudaLaunchKernel(void (*kernel)(Arguments), dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                             cudaStream_t stream) {
  const zl::Driver& driver = zl::Driver::get();
  const char* const name = reinterpret_cast<const char*>(kernel);
  void* function = nullptr;
  {
    zl::Devices& devices = zl::Devices::get();
    const std::lock_guard<std::mutex> held(devices.lock);
    zl::Loaded& of = devices.loaded[zl::current_device()];
    void*& known = of.functions[name];
    if (!known) {
      if (const int error = driver.function(&function, of.module, name)) return error;
      known = function;
    }
    function = known;
  }
  return driver.launch(function, grid.x, 1, 1, block.x, 1, 1, (unsigned)shared_bytes, stream, arguments, nullptr);
}

inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  return zl::Driver::get().fill((unsigned long long)(uintptr_t)at, (unsigned char)value, bytes, stream);
}

inline const char* cudaGetErrorString(cudaError_t error) {
  const zl::Driver& driver = zl::Driver::get();
  const char* text = nullptr;
  if (error == zl::NO_DRIVER) return "the CUDA driver, libcuda.so.1, cannot be loaded, or lacks functions";
  if (driver.error_string && !driver.error_string(error, &text) && text) return text;
  return "an error that the CUDA driver does not know";
}
