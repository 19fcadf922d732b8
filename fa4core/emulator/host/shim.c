/* The run-time library that compiled CuTe DSL host code is linked against in the emulator.
 *
 * The DSL's host code does not call the CUDA driver: it calls wrappers, of which these have the
 * signatures under another name, so that the DSL's own run-time library may be in the process too.
 * Names and types are printed in the DSL's own IR of every compiled function;
 * cuda_dialect_init_library_once is declared in the package's Python source (cutlass_dsl/tvm_ffi_provider.py), CuteDSLRT_* in its header
 * CuteDSLRuntime.h; launch configuration and attributes are cudart's cudaLaunchConfig_t and
 * cudaLaunchAttribute. Nothing here knows a kernel: launches go to one callback (see calls.py).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define CALL(name) fa4_emulated_##name /* the host module calls it so, see rewrite.py */
enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_HANDLE = 400, MAX_ATTRIBUTE = 256 };

typedef struct {
  const void *image; /* the fat binary, owned by the host module */
} Library;

typedef struct {
  const void *image;
  char *name;
} Kernel;

typedef struct {
  uint32_t grid[3], block[3];
  uint64_t dynamic_smem;
  void *stream;
  void *attributes;
  uint32_t num_attributes;
} LaunchConfig;

/* config, fat binary, kernel name, arguments -> CUDA error code */
typedef int32_t (*LaunchCallback)(const LaunchConfig *, const void *, const char *, void **);

static LaunchCallback launch_callback;
static int32_t device_attributes[MAX_ATTRIBUTE];
static int32_t current_device;

EXPORT void fa4_set_launch_callback(LaunchCallback callback) { launch_callback = callback; }

EXPORT void fa4_set_device_attribute(int32_t attribute, int32_t value) {
  if (attribute >= 0 && attribute < MAX_ATTRIBUTE) device_attributes[attribute] = value;
}

/* ---- libraries and kernels ---- */

EXPORT int32_t CALL(_cudaLibraryLoadData)(Library **library, const void *image, void *jit_options,
                                    void *jit_values, int32_t num_jit, void *options, void *values,
                                    int32_t num_options) {
  (void)jit_options, (void)jit_values, (void)num_jit;
  (void)options, (void)values, (void)num_options;
  *library = malloc(sizeof(Library));
  (*library)->image = image;
  return OK;
}

EXPORT int32_t CALL(_cudaLibraryUnload)(Library *library) {
  free(library);
  return OK;
}

EXPORT int32_t CALL(_cudaLibraryGetKernel)(Kernel **kernel, Library *library, const char *name) {
  if (!library) return INVALID_HANDLE;
  *kernel = malloc(sizeof(Kernel)); /* lives as long as the host module, which never says goodbye */
  (*kernel)->image = library->image;
  (*kernel)->name = strdup(name);
  return OK;
}

EXPORT int32_t CALL(_cuKernelGetAttribute)(int32_t *value, int32_t attribute, Kernel *kernel,
                                     int32_t device) {
  (void)attribute, (void)kernel, (void)device;
  *value = 0; /* the only one asked for is 1, static shared memory: DSL kernels have none */
  return OK;
}

EXPORT int32_t CALL(_cudaKernelSetAttributeForDevice)(Kernel *kernel, int32_t attribute, int32_t value,
                                                int32_t device) {
  (void)kernel, (void)attribute, (void)value, (void)device;
  return OK;
}

EXPORT int32_t CALL(_cudaFuncSetAttribute)(Kernel *kernel, int32_t attribute, int32_t value) {
  (void)kernel, (void)attribute, (void)value;
  return OK;
}

/* ---- devices and streams: one device, every launch is synchronous ---- */

EXPORT int32_t CALL(_cudaDeviceGetAttribute)(int32_t *value, int32_t attribute, int32_t device) {
  (void)device;
  if (attribute < 0 || attribute >= MAX_ATTRIBUTE) return INVALID_VALUE;
  *value = device_attributes[attribute];
  return OK;
}

EXPORT int32_t CALL(_cudaGetDeviceCount)(int32_t *count) { return *count = 1, OK; }
EXPORT int32_t CALL(_cudaGetDevice)(int32_t *device) { return *device = current_device, OK; }
EXPORT int32_t CALL(_cudaSetDevice)(int32_t device) { return current_device = device, OK; }
EXPORT int32_t CALL(_cudaStreamSynchronize)(void *stream) { return (void)stream, OK; }
EXPORT int32_t CALL(_cudaDeviceSynchronize)(void) { return OK; }

EXPORT int32_t CALL(_cudaOccupancyMaxActiveBlocksPerMultiprocessor)(int32_t *blocks, Kernel *kernel,
                                                              int32_t threads, int64_t smem) {
  (void)kernel, (void)threads, (void)smem;
  return *blocks = 1, OK;
}

/* ---- launches ---- */

EXPORT int32_t CALL(_cudaLaunchKernelEx)(const LaunchConfig *config, Kernel *kernel, void **arguments) {
  if (!launch_callback) {
    fprintf(stderr, "fa4core: launched outside of an emulator session; use `with emulator(...)`\n");
    return NO_DEVICE;
  }
  return launch_callback(config, kernel->image, kernel->name, arguments);
}

EXPORT int32_t CALL(_cudaLaunchKernel)(Kernel *kernel, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx,
                                 uint32_t by, uint32_t bz, void **arguments, uint64_t smem,
                                 void *stream) {
  LaunchConfig config = {{gx, gy, gz}, {bx, by, bz}, smem, stream, NULL, 0};
  return CALL(_cudaLaunchKernelEx)(&config, kernel, arguments);
}

/* ---- what TVM-FFI wrappers need ---- */

typedef void (*SetError)(const char *kind, const char *message);
typedef void (*SetErrorParts)(const char *kind, const char **parts, int32_t num_parts);

EXPORT const char *CALL(cuda_dialect_get_error_name)(int32_t code) {
  static char text[48];
  snprintf(text, sizeof text, "CUDA error %d from the emulator", code);
  return text;
}

EXPORT int32_t CALL(cuda_dialect_init_library_once)(void **state, int32_t (*init)(void **),
                                              int32_t (*load)(void **, int32_t), SetError error) {
  if (*state) return OK;
  void *library = NULL;
  int32_t code = init(&library);
  if (code == OK) code = load(&library, 0);
  if (code != OK) {
    error("RuntimeError", CALL(cuda_dialect_get_error_name)(code));
    return code;
  }
  *state = library;
  return OK;
}

EXPORT void CALL(cuda_dialect_unload_library_once)(void **state) {
  free(*state);
  *state = NULL;
}

EXPORT void CALL(CuteDSLRT_TVMFFISetRaisedCudaError)(SetErrorParts error, int32_t code) {
  const char *part = CALL(cuda_dialect_get_error_name)(code);
  error("RuntimeError", &part, 1);
}

EXPORT void CALL(CuteDSLRT_TVMFFISetRaisedCudaLaunchError)(SetErrorParts error, int32_t grid_x) {
  (void)grid_x; /* the caller passes the whole launch configuration; the message names the rule */
  const char *part = "the launch configuration exceeds the emulated device's limits";
  error("RuntimeError", &part, 1);
}
