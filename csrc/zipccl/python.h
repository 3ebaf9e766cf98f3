// C functions as functions of Python's own kind (METH_FASTCALL) whose arguments are its ints: ctypes takes longer than most of them do. Without
// Python's headers: its functions come as addresses. python_calls.py repeats the struct.
#ifndef ZIPCCL_PYTHON_H
#define ZIPCCL_PYTHON_H

#include <cstddef>
#include <cstdint>

namespace zipscape {

// PyLong_AsUnsignedLongLong, PyLong_FromLong, PyEval_SaveThread, PyEval_RestoreThread.
struct Python {
    unsigned long long (*as_number)(void*);
    void* (*of_code)(long);
    void* (*leave)();
    void (*enter)(void*);
};
static Python python;

// `run(numbers)`, an int, without Python's lock.
template <int N, class Run>
void* from_python(void** arguments, Run run) {
    uint64_t numbers[N];
    for (int i = 0; i < N; i++) numbers[i] = python.as_number(arguments[i]);
    void* state = python.leave();
    const int code = run(numbers);
    python.enter(state);
    return python.of_code(code);
}

// The same of `num` numbers, Most at most.
template <int Most, class Run>
void* from_python_up_to(void** arguments, ptrdiff_t num, Run run) {
    uint64_t numbers[Most];
    for (ptrdiff_t i = 0; i < num; i++) numbers[i] = python.as_number(arguments[i]);
    void* state = python.leave();
    const int code = run(numbers);
    python.enter(state);
    return python.of_code(code);
}

}  // namespace zipscape

#endif  // ZIPCCL_PYTHON_H
