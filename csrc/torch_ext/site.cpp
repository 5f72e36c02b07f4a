#include "site.h"

#include <pybind11/pybind11.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace gt {
namespace {

std::vector<std::string>& folders() {
  static auto* all = new std::vector<std::string>();
  return *all;
}

// A number for the file of a piece of code, 0 where it is not the user's. Codes are kept, so that none takes another's place.
uint64_t file_of(PyCodeObject* code) {
  static auto* known = new std::unordered_map<PyCodeObject*, uint64_t>();
  auto found = known->find(code);
  if (found != known->end()) return found->second;
  const char* name = PyUnicode_AsUTF8(code->co_filename);
  uint64_t h = 0xCBF29CE484222325u;
  if (!name) {
    PyErr_Clear();
    h = 0;
  } else {
    for (const auto& folder : folders())
      if (strncmp(name, folder.c_str(), folder.size()) == 0) h = 0;
    for (const char* c = name; h && *c; c++) h = (h ^ static_cast<unsigned char>(*c)) * 0x100000001B3u;
  }
  Py_INCREF(code);
  return (*known)[code] = h;
}

}  // namespace

uint64_t call_site() {
  py::gil_scoped_acquire lock;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  uint64_t found = 0;
  while (frame && !found) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (uint64_t file = file_of(code)) found = file * 31 + PyFrame_GetLasti(frame);
    Py_DECREF(code);
    PyFrameObject* back = found ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return found;
}

void ours(const char* const* prefixes, int count) { folders().assign(prefixes, prefixes + count); }

}  // namespace gt
