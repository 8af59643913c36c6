// The sidebar: keyboard and screen-reader support that Gradio's fields lack.

let hadFocus = false; // whether Load or Cancel had the focus

function fixSettings(settings) {
  // A closed sidebar must not take the focus.
  const isOpen = settings.classList.contains("open");
  const content = settings.querySelector(".sidebar-content");
  if (content && content.inert === isOpen) content.inert = !isOpen;
  setExpanded(settings.querySelector(".toggle-button"), isOpen);
  for (const button of settings.querySelectorAll(".gr-accordion > button")) {
    setExpanded(button, button.classList.contains("open"));
  }
  // Tab would stop at a scrollable list, which would then never close.
  for (const list of settings.querySelectorAll(".options:not([tabindex])")) list.tabIndex = -1;
  // Load and Cancel replace each other.
  if (hadFocus && document.activeElement === document.body) {
    const button = [...settings.querySelectorAll("#load, #cancel")].find((b) => b.checkVisibility());
    button?.focus();
  }
}

function setExpanded(button, isOpen) {
  if (button && button.ariaExpanded !== String(isOpen)) button.ariaExpanded = String(isOpen);
}

document.addEventListener("focusin", (event) => {
  hadFocus = event.target.closest("#load, #cancel") !== null;
});

// Pressing the button first commits the text typed above, which may move the button from under the
// pointer.
document.addEventListener("pointerdown", (event) => {
  event.target.closest("#load")?.setPointerCapture(event.pointerId);
  hadFocus = event.target.closest("#load, #cancel") !== null;
});

// Gradio creates the sidebar after the transcript and opens it a moment later. On a phone, where it
// covers the page, it starts closed.
const until = performance.now() + 3000;
function awaitSettings() {
  const settings = document.querySelector("#settings");
  if (settings) {
    const fix = () => fixSettings(settings);
    const what = { attributeFilter: ["class", "style"], childList: true, subtree: true };
    new MutationObserver(fix).observe(settings, what);
    fix();
  } else if (performance.now() < until) requestAnimationFrame(awaitSettings);
}
function closeSettings() {
  const button = document.querySelector("#settings.open .toggle-button");
  if (button) button.click();
  else if (performance.now() < until) requestAnimationFrame(closeSettings);
}
awaitSettings();
if (matchMedia("(max-width: 768px)").matches) closeSettings();
