// A CUDA driver whose device is the CPU: the functions that csrc/cuda/driver.h calls, over the simulated kernels. Modules
// are the text "simulated"; the memory of the device is the host's. Compiled with -include cuda_on_cpu.h.
#include "../../../csrc/cuda/norm.cuh"
#include "../../../csrc/cuda/quantize.cuh"
#include "../../../csrc/cuda/update.cuh"

#define ZL_API extern "C" __attribute__((visibility("default")))

namespace {

struct Function {
  const char* name;
  int (*launch)(unsigned blocks, unsigned threads, void** arguments);
};

template <class Arguments, void (*kernel)(Arguments)>
int run(unsigned blocks, unsigned threads, void** arguments) {
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, 0, nullptr);
}

#define UPDATE(RULE, LENGTH, P, G, S)                                                                      \
  {"_ZN2zl13update_kernelINS_" #LENGTH #RULE "ELi" #P "ELi" #G "ELi" #S "EEEvNS_15UpdateArgumentsE",        \
   run<zl::UpdateArguments, zl::update_kernel<zl::RULE, P, G, S>>}
#define UPDATES(RULE, LENGTH)                                                                              \
  UPDATE(RULE, LENGTH, 1, 1, 1), UPDATE(RULE, LENGTH, 1, 2, 1), UPDATE(RULE, LENGTH, 1, 3, 1),              \
      UPDATE(RULE, LENGTH, 0, 0, 0)
#define NORM(D) {"_ZN2zl11norm_kernelILi" #D "EEEvNS_13NormArgumentsE", run<zl::NormArguments, zl::norm_kernel<D>>}
#define QUANT(B, D)                                                                                        \
  {"_ZN2zl15quantize_kernelILi" #B "ELi" #D "EEEv8zl_quant", run<zl_quant, zl::quantize_kernel<B, D>>},     \
      {"_ZN2zl17dequantize_kernelILi" #B "ELi" #D "EEEv8zl_quant", run<zl_quant, zl::dequantize_kernel<B, D>>}

Function functions[] = {UPDATES(Adam, 4), UPDATES(Lion, 4), UPDATES(Adagrad, 7), UPDATES(Sgd, 3), NORM(1),
                        NORM(2),          NORM(3),          QUANT(8, 1),         QUANT(8, 2),     QUANT(8, 3),
                        QUANT(4, 1),      QUANT(4, 2),      QUANT(4, 3)};

constexpr int DEVICES = 2, INVALID = 1, NO_IMAGE = 209, NOT_FOUND = 500;
int contexts[DEVICES], modules[DEVICES];
int* current = nullptr;
int loads = 0;

}  // namespace

ZL_API int cuInit(unsigned) { return 0; }
ZL_API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < DEVICES ? 0 : 101;
}
ZL_API int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = contexts + device;
  return 0;
}
ZL_API int cuCtxSetCurrent(void* context) {
  current = (int*)context;
  return 0;
}
ZL_API int cuModuleLoadData(void** module, const void* image) {
  if (!current) return 201;
  if (memcmp(image, "simulated", 9)) return NO_IMAGE;
  loads++;
  *module = modules + (current - contexts);
  return 0;
}
ZL_API int cuModuleGetFunction(void** found, void* module, const char* name) {
  if (module != modules + (current - contexts)) return INVALID;
  for (Function& function : functions) {
    if (strcmp(function.name, name)) continue;
    *found = &function;
    return 0;
  }
  return NOT_FOUND;
}
ZL_API int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, void*, void** arguments,
                          void** extra) {
  if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared_bytes || extra) return INVALID;
  return ((Function*)function)->launch(grid_x, block_x, arguments);
}
ZL_API int cuMemsetD8Async(unsigned long long at, unsigned char value, size_t bytes, void*) {
  memset((void*)(uintptr_t)at, value, bytes);
  return 0;
}
ZL_API int cuGetErrorString(int error, const char** text) {
  *text = error == NO_IMAGE ? "no kernel image is available" : error == 101 ? "invalid device ordinal" : nullptr;
  return *text ? 0 : INVALID;
}
ZL_API int32_t zl_loads() { return loads; }
