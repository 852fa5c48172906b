// io_uring through raw system calls: reads and writes with a bounded number in flight.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace saria {

struct Sqe;
struct Cqe;

// Used by one thread at a time, but for forget_file. Methods that return int give 0 or an errno.
class Uring {
public:
    enum Op : uint8_t { kRead = 0, kWrite = 1 };
    using Completion = std::pair<uint64_t, int64_t>;  // tag, bytes moved or -errno

    Uring() = default;
    Uring(const Uring &) = delete;
    Uring &operator=(const Uring &) = delete;
    ~Uring() { close(); }

    // With `polled` a kernel thread takes what is queued, so that submit makes no system call while that one is awake.
    int open(unsigned depth, bool polled);
    bool is_open() const { return fd_ >= 0; }
    unsigned depth() const { return static_cast<unsigned>(requests_.size()); }
    unsigned in_flight() const { return depth() - static_cast<unsigned>(free_.size()); }

    // Pins `nbytes` at `addr`, once: transfers within them need not find their pages again. They must stay mapped until
    // close(). ENOMEM where RLIMIT_MEMLOCK forbids it.
    int register_memory(uint64_t addr, uint64_t nbytes);

    // From now on the ring keeps the files of transfers open for itself, `count` at most: a transfer need not find its
    // file again. Each descriptor must be given to forget_file before it is closed, or its number will stand for the
    // old file.
    int register_files(unsigned count);

    // Lets go of a descriptor that no transfer uses. Any thread may call it.
    void forget_file(int fd);

    // Starts one transfer. Call only with in_flight() < depth().
    int submit(Op op, int fd, uint64_t addr, uint64_t nbytes, uint64_t offset, uint64_t tag);

    // Appends finished transfers to `out`; waits up to `timeout_s` for the first one. A signal ends the wait early.
    int reap(double timeout_s, std::vector<Completion> &out);

    // Waits for everything in flight (the buffers belong to the caller), then gives the ring back.
    void close();

private:
    struct Request {
        Op op;
        int fd, slot;  // slot: of the file among the registered ones, or -1
        uint64_t addr, nbytes, offset, tag, done;
    };

    int map_rings(const struct Params &params);
    int slot_of(int fd);
    bool update_file(unsigned slot, int fd);
    void push(uint32_t index);
    int enter(unsigned min_complete, double timeout_s);
    void drain(std::vector<Completion> &out);
    bool settle(Request &request, int64_t result, std::vector<Completion> &out);
    void release();

    int fd_ = -1;
    uint64_t pinned_ = 0, pinned_bytes_ = 0;
    bool timed_enter_ = false, polled_ = false;
    uint32_t unsubmitted_ = 0;
    std::vector<Request> requests_;
    std::vector<uint32_t> free_;

    std::mutex files_mutex_;
    std::unordered_map<int, int> slots_;  // by descriptor
    std::vector<int> free_slots_;

    void *rings_[2] = {nullptr, nullptr};
    size_t rings_bytes_[2] = {0, 0};
    Sqe *sqes_ = nullptr;
    size_t sqes_bytes_ = 0;
    uint32_t *sq_tail_ = nullptr, *sq_flags_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    uint32_t sq_mask_ = 0, cq_mask_ = 0;
    Cqe *cqes_ = nullptr;
};

}  // namespace saria
