#include "call_site.h"

#include <string>
#include <unordered_map>

#include "host.h"

namespace py = pybind11;

namespace gt {
namespace {

std::string& library_folder() {
  static auto* folder = new std::string();
  return *folder;
}

// A number for the file of a piece of code. Codes are kept alive, so that no other takes the address of one.
uint64_t file_of(PyCodeObject* code) {
  static auto* known = new std::unordered_map<PyCodeObject*, uint64_t>();
  auto at = known->find(code);
  if (at != known->end()) return at->second;
  const char* name = PyUnicode_AsUTF8(code->co_filename);
  if (!name) PyErr_Clear();
  const bool is_ours = name && !library_folder().empty() && std::string(name).rfind(library_folder(), 0) == 0;
  Py_INCREF(code);
  return (*known)[code] = name && !is_ours ? hash_text(name) : 0;
}

}  // namespace

uint64_t call_site() {
  py::gil_scoped_acquire lock;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  if (!frame) return 0;
  PyCodeObject* code = PyFrame_GetCode(frame);
  const uint64_t file = file_of(code), site = file ? file * 31 + PyFrame_GetLasti(frame) : 0;
  Py_DECREF(code);
  Py_DECREF(frame);
  return site;
}

void bind_call_site(py::module_& m) {
  m.def("set_library_folder", [](const std::string& folder) { library_folder() = folder; },
        "Instructions of files whose path begins so are our own, not the program's.");
}

}  // namespace gt
