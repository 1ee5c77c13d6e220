/* A driver whose memory is that of the host. Prototypes and structures are those of NVIDIA's documentation, "CUDA Driver
   API": so a call with other arguments, or a structure with other fields, is found. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;

typedef enum { LOCATION_INVALID = 0, LOCATION_DEVICE = 1 } CUmemLocationType;
typedef struct {
  CUmemLocationType type;
  int id;
} CUmemLocation;
typedef struct {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
} CUmemAllocationProp;
typedef struct {
  CUmemLocation location;
  int flags;
} CUmemAccessDesc;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_SUPPORTED = 801 };
enum { GRANULARITY = 1 << 16, MAX_BYTES = 1 << 24, DEVICE = 1 };

/* What tests set and look at. */
int refuses_reading_only, exports_descriptors = 1, refuses_pins;
int live_handles, live_ranges, live_mappings, contexts;
/* Of the last pin: its flags; and where memory is pinned. */
int pin_flags;
static void *pinned;

static int valid(CUmemLocation location) { return location.type == LOCATION_DEVICE && location.id == DEVICE; }

#define REQUIRE(condition, error) \
  do {                            \
    if (!(condition)) return error; \
  } while (0)

CUresult cuInit(unsigned int flags) { return flags == 0 ? SUCCESS : INVALID_VALUE; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal + 40;
  return ordinal == DEVICE ? SUCCESS : INVALID_VALUE;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  REQUIRE(attribute == 103 && device == DEVICE + 40, INVALID_VALUE);
  *value = exports_descriptors;
  return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  REQUIRE(device == DEVICE + 40, INVALID_VALUE);
  *context = (CUcontext)(uintptr_t)0x7f00deadbeef0000;
  return SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  REQUIRE(context == (CUcontext)(uintptr_t)0x7f00deadbeef0000, INVALID_CONTEXT);
  contexts++;
  return SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  REQUIRE(contexts > 0, INVALID_CONTEXT);
  *context = (CUcontext)(uintptr_t)0x7f00deadbeef0000;
  contexts--;
  return SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, int option) {
  REQUIRE(contexts && prop->type == 1 && prop->requestedHandleTypes == 1 && valid(prop->location), INVALID_VALUE);
  REQUIRE(option == 1, INVALID_VALUE);
  *granularity = GRANULARITY;
  return SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
  REQUIRE(contexts && prop->type == 1 && prop->requestedHandleTypes == 1 && valid(prop->location), INVALID_VALUE);
  REQUIRE(!prop->win32HandleMetaData && !prop->allocFlags.compressionType && !prop->allocFlags.usage, INVALID_VALUE);
  REQUIRE(size % GRANULARITY == 0 && flags == 0, INVALID_VALUE);
  REQUIRE(size <= MAX_BYTES, OUT_OF_MEMORY);
  int file = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (ftruncate(file, (off_t)size)) return OUT_OF_MEMORY;
  *handle = ((CUmemGenericAllocationHandle)1 << 40) + (unsigned)file;
  live_handles++;
  return SUCCESS;
}

static int file_of(CUmemGenericAllocationHandle handle) { return (int)(handle - ((unsigned long long)1 << 40)); }

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags) {
  REQUIRE(contexts && type == 1 && flags == 0, INVALID_VALUE);
  *(int *)shareable = dup(file_of(handle));
  return SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type) {
  REQUIRE(contexts && type == 1, INVALID_VALUE);
  int file = dup((int)(uintptr_t)shareable);
  REQUIRE(file >= 0, INVALID_VALUE);
  *handle = ((CUmemGenericAllocationHandle)1 << 40) + (unsigned)file;
  live_handles++;
  return SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  REQUIRE(contexts, INVALID_CONTEXT);
  live_handles--;
  return close(file_of(handle)) ? INVALID_VALUE : SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr fixed,
                             unsigned long long flags) {
  REQUIRE(contexts && alignment == 0 && fixed == 0 && flags == 0 && size % GRANULARITY == 0, INVALID_VALUE);
  void *range = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *address = (CUdeviceptr)(uintptr_t)range;
  live_ranges++;
  return SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  REQUIRE(contexts, INVALID_CONTEXT);
  live_ranges--;
  return munmap((void *)(uintptr_t)address, size) ? INVALID_VALUE : SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  struct stat found;
  REQUIRE(contexts && offset == 0 && flags == 0, INVALID_VALUE);
  REQUIRE(!fstat(file_of(handle), &found) && (size_t)found.st_size == size, INVALID_VALUE);
  void *mapped = mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, file_of(handle), 0);
  REQUIRE(mapped != MAP_FAILED, INVALID_VALUE);
  live_mappings++;
  return SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  REQUIRE(contexts, INVALID_CONTEXT);
  live_mappings--;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  return mmap((void *)(uintptr_t)address, size, PROT_NONE, flags, -1, 0) == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
  REQUIRE(contexts && count == 1 && valid(access->location), INVALID_VALUE);
  REQUIRE(access->flags == 3 || (access->flags == 1 && !refuses_reading_only), NOT_SUPPORTED);
  int rights = access->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ;
  return mprotect((void *)(uintptr_t)address, size, rights) ? INVALID_VALUE : SUCCESS;
}

CUresult cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags) {
  REQUIRE(contexts && p && !pinned && bytesize % 4096 == 0, INVALID_VALUE);
  REQUIRE(!refuses_pins && !(Flags & 8 && refuses_reading_only), NOT_SUPPORTED);
  pin_flags = (int)Flags;
  pinned = p;
  live_mappings++;
  return SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags) {
  REQUIRE(contexts && p == pinned && Flags == 0, INVALID_VALUE);
  *pdptr = (CUdeviceptr)(uintptr_t)p;
  return SUCCESS;
}

CUresult cuMemHostUnregister(void *p) {
  unsigned char page;
  /* The memory is still mapped. */
  REQUIRE(contexts && p == pinned && !mincore(p, 1, &page), INVALID_VALUE);
  pinned = NULL;
  live_mappings--;
  return SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
  REQUIRE(attribute == 9 && address, INVALID_VALUE);
  *(int *)data = DEVICE + 1;
  return SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
  *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
  return SUCCESS;
}
