# te_plugin_library(<name> <source>...): one shared library te_plugin/lib/libte_plugin_<name>.so bound through TVM FFI.

# Asks the Python package apache-tvm-ffi where its headers and its library are.
function(te_plugin_ask_tvm_ffi option result)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m tvm_ffi.config ${option}
    OUTPUT_VARIABLE answer ERROR_VARIABLE problem RESULT_VARIABLE code OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${Python_EXECUTABLE} has no apache-tvm-ffi: run '${Python_EXECUTABLE} -m pip install apache-tvm-ffi', "
                        "or name another interpreter with -DPython_EXECUTABLE=...\n${problem}")
  endif()
  set(${result} "${answer}" PARENT_SCOPE)
endfunction()

te_plugin_ask_tvm_ffi(--includedir TE_PLUGIN_TVM_FFI_INCLUDE)
te_plugin_ask_tvm_ffi(--dlpack-includedir TE_PLUGIN_DLPACK_INCLUDE)
te_plugin_ask_tvm_ffi(--libfiles TE_PLUGIN_TVM_FFI_LIBRARY)
add_library(te_plugin_tvm_ffi SHARED IMPORTED)
set_target_properties(te_plugin_tvm_ffi PROPERTIES
  IMPORTED_LOCATION "${TE_PLUGIN_TVM_FFI_LIBRARY}"
  INTERFACE_INCLUDE_DIRECTORIES "${TE_PLUGIN_TVM_FFI_INCLUDE};${TE_PLUGIN_DLPACK_INCLUDE}")

function(te_plugin_library name)
  set(target te_plugin_${name})
  add_library(${target} SHARED ${ARGN})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/csrc/include")
  target_link_libraries(${target} PRIVATE te_plugin_tvm_ffi Threads::Threads)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  # A wheel takes the library from the install step; everybody else uses the source tree.
  if(NOT DEFINED SKBUILD_STATE OR SKBUILD_STATE STREQUAL "editable")
    set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/te_plugin/lib")
  endif()
  install(TARGETS ${target} LIBRARY DESTINATION te_plugin/lib)
endfunction()
