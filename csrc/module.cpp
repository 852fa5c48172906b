// saria_vllm._native: everything here releases the GIL while it moves bytes. The stubs are in saria_vllm/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>

#include "checksum.h"
#include "pages.h"
#include "uring.h"

namespace nb = nanobind;
using namespace saria;

namespace {

constexpr unsigned kDepthMax = 4096;
constexpr double kTimeoutMax = 1e6;

// The GIL, released for a scope. CPython before 3.14 ends a daemon thread that wants it back while the interpreter ends,
// by an unwinding that no destructor lets through: the process would abort. Such a thread waits for its end instead.
class NoGil {
  public:
    NoGil() : state_(PyEval_SaveThread()) {}
    NoGil(const NoGil &) = delete;
    ~NoGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) pause();
        }
    }

  private:
    PyThreadState *state_;
};

[[noreturn]] void raise_errno(int error) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

uint8_t *pointer(uint64_t address) { return reinterpret_cast<uint8_t *>(address); }

void check_record(uint64_t nbytes) {
    if (nbytes % kBlockBytes != 0)
        throw std::invalid_argument("nbytes " + std::to_string(nbytes) + " is not a multiple of 4096");
}

uint64_t py_checksum(uint64_t addr, uint64_t nbytes, uint64_t seed) {
    check_record(nbytes);
    NoGil nogil;
    return checksum(pointer(addr), nbytes, seed);
}

void check_many(const PageMap &map, const std::vector<uint64_t> &records, const std::vector<Blocks> &blocks,
                bool skip_negative) {
    if (records.size() != blocks.size()) throw std::invalid_argument("one block list per record is needed");
    for (const Blocks &list : blocks) map.check(list, skip_negative);
}

void gather(const PageMap &map, uint64_t dst, const Blocks &blocks) {
    map.check(blocks, false);
    NoGil nogil;
    map.gather(pointer(dst), blocks);
}

void gather_many(const PageMap &map, const std::vector<uint64_t> &dsts, const std::vector<Blocks> &blocks) {
    check_many(map, dsts, blocks, false);
    NoGil nogil;
    for (size_t i = 0; i < dsts.size(); ++i) map.gather(pointer(dsts[i]), blocks[i]);
}

void scatter(const PageMap &map, uint64_t src, const Blocks &blocks) {
    map.check(blocks, true);
    NoGil nogil;
    map.scatter(pointer(src), blocks);
}

void scatter_many(const PageMap &map, const std::vector<uint64_t> &srcs, const std::vector<Blocks> &blocks) {
    check_many(map, srcs, blocks, true);
    NoGil nogil;
    for (size_t i = 0; i < srcs.size(); ++i) map.scatter(pointer(srcs[i]), blocks[i]);
}

uint64_t scatter_verify(const PageMap &map, uint64_t src, uint64_t nbytes, uint64_t seed, const Blocks &blocks) {
    check_record(nbytes);
    map.check(blocks, true);
    if (nbytes < map.block_bytes() * blocks.size())
        throw std::invalid_argument("nbytes " + std::to_string(nbytes) + " is less than the payload of " +
                                    std::to_string(blocks.size()) + " blocks");
    NoGil nogil;
    return map.scatter_verify(pointer(src), nbytes, seed, blocks);
}

struct PyUring {
    PyUring(unsigned depth, bool polled) {
        if (depth == 0 || depth > kDepthMax) throw std::invalid_argument("depth must be in 1..4096");
        if (int error = ring.open(depth, polled)) raise_errno(error);
    }

    ~PyUring() { close(); }

    void register_memory(uint64_t addr, uint64_t nbytes) {
        if (!ring.is_open()) raise_errno(EBADF);
        int error;
        {
            NoGil nogil;
            error = ring.register_memory(addr, nbytes);
        }
        if (error) raise_errno(error);
    }

    void register_files(unsigned count) {
        if (!ring.is_open()) raise_errno(EBADF);
        if (int error = ring.register_files(count)) raise_errno(error);
    }

    void forget_file(int fd) {
        NoGil nogil;
        ring.forget_file(fd);
    }

    void submit(int op, int fd, uint64_t addr, uint64_t nbytes, uint64_t offset, uint64_t tag) {
        if (op != Uring::kRead && op != Uring::kWrite) throw std::invalid_argument("op must be 0 or 1");
        if (nbytes == 0) throw std::invalid_argument("nbytes must be above zero");
        if (!ring.is_open()) raise_errno(EBADF);
        if (ring.in_flight() == ring.depth()) throw std::runtime_error("more than depth transfers in flight");
        int error;
        {
            NoGil nogil;
            error = ring.submit(static_cast<Uring::Op>(op), fd, addr, nbytes, offset, tag);
        }
        if (error) raise_errno(error);
    }

    std::vector<Uring::Completion> reap(double timeout_s) {
        if (!(timeout_s >= 0)) throw std::invalid_argument("timeout_s must not be negative");
        if (!ring.is_open()) raise_errno(EBADF);
        std::vector<Uring::Completion> out;
        int error;
        {
            NoGil nogil;
            error = ring.reap(timeout_s < kTimeoutMax ? timeout_s : kTimeoutMax, out);
        }
        if (error) raise_errno(error);
        return out;
    }

    unsigned in_flight() const { return ring.is_open() ? ring.in_flight() : 0; }

    void close() {
        NoGil nogil;
        ring.close();
    }

    Uring ring;
};

}  // namespace

NB_MODULE(_native, m) {
    m.def("checksum", py_checksum, nb::arg("addr"), nb::arg("nbytes"), nb::arg("seed"));

    m.def("block_sum_by_all", [](uint64_t addr) { return block_sum_by_all(pointer(addr)); }, nb::arg("addr"));

    nb::class_<PageMap>(m, "PageMap")
        .def(nb::init<std::vector<uint64_t>, std::vector<int64_t>, std::vector<uint64_t>, int64_t>(),
             nb::arg("bases"), nb::arg("strides"), nb::arg("page_bytes"), nb::arg("num_blocks"))
        .def_prop_ro("block_bytes", &PageMap::block_bytes)
        .def("gather", gather, nb::arg("dst"), nb::arg("blocks"))
        .def("gather_many", gather_many, nb::arg("dsts"), nb::arg("blocks"))
        .def("scatter", scatter, nb::arg("src"), nb::arg("blocks"))
        .def("scatter_many", scatter_many, nb::arg("srcs"), nb::arg("blocks"))
        .def("scatter_verify", scatter_verify, nb::arg("src"), nb::arg("nbytes"), nb::arg("seed"),
             nb::arg("blocks"));

    nb::class_<PyUring>(m, "Uring")
        .def(nb::init<unsigned, bool>(), nb::arg("depth"), nb::arg("polled"))
        .def("register_memory", &PyUring::register_memory, nb::arg("addr"), nb::arg("nbytes"))
        .def("register_files", &PyUring::register_files, nb::arg("count"))
        .def("forget_file", &PyUring::forget_file, nb::arg("fd"))
        .def("submit", &PyUring::submit, nb::arg("op"), nb::arg("fd"), nb::arg("addr"), nb::arg("nbytes"),
             nb::arg("offset"), nb::arg("tag"))
        .def("reap", &PyUring::reap, nb::arg("timeout_s"))
        .def_prop_ro("in_flight", &PyUring::in_flight)
        .def("close", &PyUring::close);
}
