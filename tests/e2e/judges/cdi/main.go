// Command cdi judges a directory of CDI files as container runtimes do, with the specification's own library and schema.
//
//	cdi DIRECTORY [DEVICE…]
//
// It prints what a container with these devices gets, as the OCI runtime's JSON. What is wrong goes to stderr, and the
// exit status is 1.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/schema"
)

func main() {
	directory, devices := os.Args[1], os.Args[2:]
	cache, err := cdi.NewCache(cdi.WithSpecDirs(directory), cdi.WithAutoRefresh(false))
	wrong := []error{err}
	for _, errors := range cache.GetErrors() {
		wrong = append(wrong, errors...)
	}
	files, _ := filepath.Glob(filepath.Join(directory, "*.json"))
	for _, file := range files {
		wrong = append(wrong, schema.BuiltinSchema().ValidateFile(file))
	}
	container := oci.Spec{}
	_, err = cache.InjectDevices(&container, devices...)
	wrong = append(wrong, err)

	status := 0
	for _, each := range wrong {
		if each != nil {
			fmt.Fprintln(os.Stderr, each)
			status = 1
		}
	}
	json.NewEncoder(os.Stdout).Encode(map[string]any{"devices": cache.ListDevices(), "container": container})
	os.Exit(status)
}
