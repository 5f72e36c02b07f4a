#include "call_site.h"

#include <pybind11/stl.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "host.h"

namespace py = pybind11;

namespace gt {
namespace {

std::vector<std::string>& library_paths() {
  static auto* paths = new std::vector<std::string>();
  return *paths;
}

bool is_library(const std::string& file) {
  for (const auto& path : library_paths())
    if (file.rfind(path, 0) == 0) return true;
  return false;
}

// A number for the file of a piece of code, 0 for ours. Codes are kept alive, so that no other takes an address.
uint64_t file_of(PyCodeObject* code) {
  static auto* known = new std::unordered_map<PyCodeObject*, uint64_t>();
  auto at = known->find(code);
  if (at != known->end()) return at->second;
  const char* name = PyUnicode_AsUTF8(code->co_filename);
  if (!name) PyErr_Clear();
  Py_INCREF(code);
  return (*known)[code] = name && !is_library(name) ? hash_text(name) : 0;
}

uint64_t site_of(PyFrameObject* frame) {
  PyCodeObject* code = PyFrame_GetCode(frame);
  const uint64_t file = file_of(code), site = file ? file * 31 + PyFrame_GetLasti(frame) : 0;
  Py_DECREF(code);
  return site;
}

}  // namespace

uint64_t call_site(CallSite of) {
  py::gil_scoped_acquire lock;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  uint64_t site = frame ? site_of(frame) : 0;
  while (frame && !site && of == CallSite::outside) {
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    if ((frame = caller)) site = site_of(frame);
  }
  Py_XDECREF(frame);
  return site;
}

void bind_call_site(py::module_& m) {
  m.def("set_library_paths", [](std::vector<std::string> paths) { library_paths() = std::move(paths); },
        "Instructions of files whose path begins so are our own, not the program's.");
}

}  // namespace gt
