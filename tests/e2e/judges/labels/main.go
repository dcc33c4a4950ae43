// Command labels reads lines of key=value and judges them as the API server judges a node's labels.
//
// What is wrong goes to stderr, one line each, and the exit status is 1.
package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

func main() {
	status := 0
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		key, value, _ := strings.Cut(lines.Text(), "=")
		for _, wrong := range append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...) {
			fmt.Fprintf(os.Stderr, "%q: %s\n", lines.Text(), wrong)
			status = 1
		}
	}
	os.Exit(status)
}
