// The CUDA driver's functions that launches and copies use, on the CPU: a kernel is noted with its arguments and does
// not run, a copy is made at once. A function handle is an array of int64: how many arguments, then the bytes of each.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

int64_t num_launches = 0, words[32], launched_on = 0;
int64_t capture_status = 0, query_code = 0, num_queries = 0;

int cuFuncGetParamInfo(int64_t* function, size_t index, size_t* offset, size_t* size) {
  if ((int64_t)index >= function[0]) return 1;
  *offset = 0, *size = (size_t)function[1 + index];
  return 0;
}

int cuLaunchKernel(int64_t* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, void* stream, void** arguments, void** extra) {
  (void)x, (void)y, (void)z, (void)threads, (void)ty, (void)tz, (void)shared, (void)extra;
  ++num_launches, launched_on = (int64_t)stream;
  for (int64_t i = 0; i < function[0]; ++i) memcpy(&words[i], arguments[i], sizeof(int64_t));
  return 0;
}

int cuCtxGetCurrent(void** context) { return *context = (void*)1, 0; }
int cuCtxSetCurrent(void* context) { return (void)context, 0; }
int cuStreamIsCapturing(void* stream, int* status) { return (void)stream, *status = (int)capture_status, 0; }
int cuEventRecord(void* event, void* stream) { return (void)event, (void)stream, 0; }
int cuEventQuery(void* event) { return (void)event, ++num_queries, (int)query_code; }
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) { return (void)stream, (void)event, (void)flags, 0; }
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t count, void* stream) {
  (void)stream;
  memcpy((void*)target, (void*)source, count);
  return 0;
}
