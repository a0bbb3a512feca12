# cmake -DCXX=<aarch64 compiler> -DNM=<its nm> -DSOURCES=<files> -DWORK=<folder> -P this
#
# The kernels compile for aarch64 without a warning, and the x86 tables are empty there.
foreach(source IN LISTS SOURCES)
  get_filename_component(name ${source} NAME_WE)
  set(object ${WORK}/${name}.aarch64.o)
  execute_process(
    COMMAND ${CXX} -std=c++20 -O3 -ffp-contract=off -Wall -Wextra -Werror -c ${source} -o ${object}
    COMMAND_ERROR_IS_FATAL ANY)
  execute_process(
    COMMAND ${NM} --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(LENGTH "${symbols}" length)
  if(name MATCHES "avx" AND length GREATER 0)
    message(FATAL_ERROR "${name} is not empty on aarch64:\n${symbols}")
  elseif(NOT name MATCHES "avx" AND length EQUAL 0)
    message(FATAL_ERROR "${name} is empty on aarch64")
  endif()
  message(STATUS "${name}: good")
endforeach()
