#include "uring.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <thread>
#include <unistd.h>

namespace saria {

// The kernel's ABI, spelled out because build machines often have headers older than io_uring.
struct SqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, resv1;
    uint64_t user_addr;
};
struct CqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, resv1;
    uint64_t user_addr;
};
struct Params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, resv[3];
    SqOffsets sq_off;
    CqOffsets cq_off;
};
struct Sqe {
    uint8_t opcode, flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t off, addr;
    uint32_t len, rw_flags;
    uint64_t user_data;
    uint16_t buf_index, pad16[3];
    uint64_t pad[2];
};
struct Cqe {
    uint64_t user_data;
    int32_t res;
    uint32_t flags;
};
struct FilesUpdate {
    uint32_t offset, resv;
    uint64_t fds;
};
struct Timespec {
    int64_t sec, nsec;
};
struct GeteventsArg {
    uint64_t sigmask;
    uint32_t sigmask_sz, pad;
    uint64_t ts;
};
static_assert(sizeof(Params) == 120 && sizeof(Sqe) == 64 && sizeof(Cqe) == 16);

namespace {

constexpr long kSetup = 425, kEnter = 426, kRegister = 427;  // the same on x86 and on what Linux got after 2019
constexpr uint8_t kOpcode[] = {22, 23};                      // IORING_OP_READ, IORING_OP_WRITE: Linux 5.6
constexpr uint8_t kPinnedOpcode[] = {4, 5};                  // IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED
constexpr unsigned kRegisterBuffers = 0, kRegisterFiles = 2, kUnregisterFiles = 3, kRegisterFilesUpdate = 6;
constexpr uint8_t kFixedFile = 1u << 0;
constexpr uint32_t kSetupSqpoll = 1u << 1, kSqNeedWakeup = 1u << 0, kSqIdleMs = 50;
constexpr uint32_t kFeatSingleMmap = 1u << 0, kFeatSqpollAnyFile = 1u << 7, kFeatExtArg = 1u << 8;
constexpr unsigned kEnterGetevents = 1u << 0, kEnterSqWakeup = 1u << 1, kEnterExtArg = 1u << 3;
constexpr uint64_t kOffSqRing = 0, kOffCqRing = 0x8000000, kOffSqes = 0x10000000;
constexpr uint64_t kTransferBytesMax = 1u << 30;  // the kernel cuts at 2 GiB - 4 KiB, which O_DIRECT may dislike

double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename T> T *at(void *base, uint32_t offset) {
    return reinterpret_cast<T *>(static_cast<uint8_t *>(base) + offset);
}

void *map(int fd, size_t nbytes, uint64_t offset) {
    void *address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                         static_cast<off_t>(offset));
    return address == MAP_FAILED ? nullptr : address;
}

}  // namespace

int Uring::open(unsigned depth, bool polled) {
    Params params{};
    if (polled) {
        params.flags = kSetupSqpoll;
        params.sq_thread_idle = kSqIdleMs;
    }
    fd_ = static_cast<int>(syscall(kSetup, depth, &params));
    if (fd_ < 0) return errno;
    timed_enter_ = params.features & kFeatExtArg;
    polled_ = polled;
    int error = polled && !(params.features & kFeatSqpollAnyFile) ? EOPNOTSUPP : map_rings(params);  // Linux < 5.11
    if (error) {
        release();
        return error;
    }
    requests_.resize(depth);
    for (uint32_t i = 0; i < depth; ++i) free_.push_back(depth - 1 - i);
    return 0;
}

int Uring::map_rings(const Params &params) {
    rings_bytes_[0] = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    rings_bytes_[1] = params.cq_off.cqes + params.cq_entries * sizeof(Cqe);
    bool single = params.features & kFeatSingleMmap;
    if (single) rings_bytes_[0] = std::max(rings_bytes_[0], rings_bytes_[1]);
    if (!(rings_[0] = map(fd_, rings_bytes_[0], kOffSqRing))) return errno;
    if (!single && !(rings_[1] = map(fd_, rings_bytes_[1], kOffCqRing))) return errno;
    sqes_bytes_ = params.sq_entries * sizeof(Sqe);
    if (!(sqes_ = static_cast<Sqe *>(map(fd_, sqes_bytes_, kOffSqes)))) return errno;
    void *cq = single ? rings_[0] : rings_[1];
    sq_tail_ = at<uint32_t>(rings_[0], params.sq_off.tail);
    sq_flags_ = at<uint32_t>(rings_[0], params.sq_off.flags);
    sq_array_ = at<uint32_t>(rings_[0], params.sq_off.array);
    sq_mask_ = *at<uint32_t>(rings_[0], params.sq_off.ring_mask);
    cq_head_ = at<uint32_t>(cq, params.cq_off.head);
    cq_tail_ = at<uint32_t>(cq, params.cq_off.tail);
    cq_mask_ = *at<uint32_t>(cq, params.cq_off.ring_mask);
    cqes_ = at<Cqe>(cq, params.cq_off.cqes);
    return 0;
}

int Uring::register_memory(uint64_t addr, uint64_t nbytes) {
    if (pinned_bytes_ > 0) return EBUSY;
    iovec memory{reinterpret_cast<void *>(addr), nbytes};
    if (syscall(kRegister, fd_, kRegisterBuffers, &memory, 1) < 0) return errno;
    pinned_ = addr;
    pinned_bytes_ = nbytes;
    return 0;
}

int Uring::register_files(unsigned count) {
    std::vector<int> none(count, -1);
    if (syscall(kRegister, fd_, kRegisterFiles, none.data(), count) < 0) return errno;
    std::lock_guard<std::mutex> lock(files_mutex_);
    for (int slot = static_cast<int>(count) - 1; slot >= 0; --slot) free_slots_.push_back(slot);
    return 0;
}

void Uring::forget_file(int fd) {
    std::lock_guard<std::mutex> lock(files_mutex_);
    auto found = slots_.find(fd);
    if (found == slots_.end()) return;
    // A slot that cannot be emptied is not used again.
    if (update_file(static_cast<unsigned>(found->second), -1)) free_slots_.push_back(found->second);
    slots_.erase(found);
}

// The slot of a file, which is given one where there are any; -1 for none.
int Uring::slot_of(int fd) {
    std::lock_guard<std::mutex> lock(files_mutex_);
    auto found = slots_.find(fd);
    if (found != slots_.end()) return found->second;
    if (free_slots_.empty() || !update_file(static_cast<unsigned>(free_slots_.back()), fd)) return -1;
    int slot = slots_[fd] = free_slots_.back();
    free_slots_.pop_back();
    return slot;
}

bool Uring::update_file(unsigned slot, int fd) {
    FilesUpdate update{slot, 0, reinterpret_cast<uint64_t>(&fd)};
    return syscall(kRegister, fd_, kRegisterFilesUpdate, &update, 1) == 1;
}

int Uring::submit(Op op, int fd, uint64_t addr, uint64_t nbytes, uint64_t offset, uint64_t tag) {
    uint32_t index = free_.back();
    free_.pop_back();
    requests_[index] = {op, fd, slot_of(fd), addr, nbytes, offset, tag, 0};
    push(index);
    int error = enter(0, 0);
    return error == EAGAIN || error == EBUSY || error == EINTR ? 0 : error;  // reap submits it again
}

void Uring::push(uint32_t index) {
    const Request &request = requests_[index];
    uint32_t tail = *sq_tail_;
    Sqe &sqe = sqes_[tail & sq_mask_];
    sqe = Sqe{};
    bool pinned = request.addr >= pinned_ && request.nbytes <= pinned_bytes_ &&
                  request.addr - pinned_ <= pinned_bytes_ - request.nbytes;
    sqe.opcode = (pinned ? kPinnedOpcode : kOpcode)[request.op];
    sqe.fd = request.slot < 0 ? request.fd : request.slot;
    sqe.flags = request.slot < 0 ? 0 : kFixedFile;
    sqe.addr = request.addr + request.done;
    sqe.off = request.offset + request.done;
    sqe.len = static_cast<uint32_t>(std::min(request.nbytes - request.done, kTransferBytesMax));
    sqe.user_data = index;
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++unsubmitted_;
}

// Submits what is queued and, when asked, waits for completions. Gives 0 (a timeout too) or an errno.
int Uring::enter(unsigned min_complete, double timeout_s) {
    unsigned flags = kEnterGetevents;
    if (polled_) {
        __atomic_thread_fence(__ATOMIC_SEQ_CST);  // What was queued must be seen before the kernel's thread sleeps.
        bool asleep = __atomic_load_n(sq_flags_, __ATOMIC_RELAXED) & kSqNeedWakeup;
        if (!asleep) unsubmitted_ = 0;
        if (!asleep && min_complete == 0) return 0;
        if (asleep) flags |= kEnterSqWakeup;
    }
    Timespec ts{};
    GeteventsArg arg{};
    bool timed = min_complete > 0 && timed_enter_;
    if (timed) {
        ts.sec = static_cast<int64_t>(timeout_s);
        ts.nsec = static_cast<int64_t>((timeout_s - std::floor(timeout_s)) * 1e9);
        arg.ts = reinterpret_cast<uint64_t>(&ts);
        flags |= kEnterExtArg;
    }
    long submitted = syscall(kEnter, fd_, unsubmitted_, timed ? min_complete : 0, flags, timed ? &arg : nullptr,
                             timed ? sizeof(arg) : 0);
    if (submitted < 0) return errno == ETIME ? 0 : errno;
    unsubmitted_ -= static_cast<uint32_t>(submitted);
    if (min_complete > 0 && !timed) {  // Linux < 5.11
        pollfd ready{fd_, POLLIN, 0};
        if (poll(&ready, 1, static_cast<int>(std::ceil(timeout_s * 1e3))) < 0) return errno;
    }
    return 0;
}

int Uring::reap(double timeout_s, std::vector<Completion> &out) {
    double deadline = now_s() + timeout_s;
    for (;;) {
        drain(out);
        bool done = !out.empty() || in_flight() == 0;
        double left = deadline - now_s();
        if (done && unsubmitted_ == 0) return 0;
        int error = enter(!done && left > 0, left);
        if (error == EAGAIN || error == EBUSY)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        else if (error && error != EINTR)
            return error;
        if (done || left <= 0 || error == EINTR) {
            drain(out);
            return 0;
        }
    }
}

void Uring::drain(std::vector<Completion> &out) {
    uint32_t head = *cq_head_;
    uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) {
        const Cqe &cqe = cqes_[head & cq_mask_];
        auto index = static_cast<uint32_t>(cqe.user_data);
        if (settle(requests_[index], cqe.res, out))
            free_.push_back(index);
        else
            push(index);
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
}

// True when the request has ended and was appended to `out`; false when its rest must be submitted.
bool Uring::settle(Request &request, int64_t result, std::vector<Completion> &out) {
    if (result == -EINTR) return false;
    if (result > 0) {
        request.done += static_cast<uint64_t>(result);
        if (request.done < request.nbytes) return false;
    }
    out.emplace_back(request.tag, result < 0 ? result : static_cast<int64_t>(request.done));
    return true;
}

void Uring::close() {
    std::vector<Completion> ignored;
    while (is_open() && in_flight() > 0) {
        ignored.clear();
        if (reap(1.0, ignored)) break;
    }
    release();
}

void Uring::release() {
    for (int i : {0, 1})
        if (rings_[i]) munmap(rings_[i], rings_bytes_[i]);
    if (sqes_) munmap(sqes_, sqes_bytes_);
    rings_[0] = rings_[1] = nullptr;
    sqes_ = nullptr;
    requests_.clear();
    free_.clear();
    std::lock_guard<std::mutex> lock(files_mutex_);
    // The ring itself is given back later, by a thread of the kernel: files must not stay open until then.
    if (fd_ >= 0 && slots_.size() + free_slots_.size() > 0) syscall(kRegister, fd_, kUnregisterFiles, nullptr, 0);
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
    slots_.clear();
    free_slots_.clear();
    unsubmitted_ = 0;
    pinned_ = pinned_bytes_ = 0;
}

}  // namespace saria
