// Threads of the CPU library: a small pool that runs numbered tasks.
//
// Which thread runs which task is not fixed, so a task must write only what belongs to its number; then results do not depend on
// the number of threads. Callers that need a sum over tasks let each task write its partial result and add them in order.
#pragma once

#include <cstdint>
#include <functional>

namespace te {

// Runs task(0) .. task(count - 1), on up to get_num_threads() threads, and returns when all have ended. Called from inside a task
// it runs them one after the other. The first exception of a task is thrown here again; tasks not begun by then are left out.
void parallel_for(int64_t count, const std::function<void(int64_t)>& task);

// Threads that parallel_for uses, the caller among them. The first value is the number of processors this process may run on.
int64_t get_num_threads();
void set_num_threads(int64_t threads);

}  // namespace te
